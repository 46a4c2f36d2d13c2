# One GPU that no other job has; on a node with MIG instances it may be one of these (mig.nomad.hcl, constraint.nomad.hcl). The task runs in a
# chroot with the host's /usr, so nvidia-smi and the driver's libraries are those of the node.
job "exclusive" {
  type = "batch"

  group "gpus" {
    task "gpus" {
      driver = "exec"
      config {
        command = "/usr/bin/nvidia-smi"
        args    = ["-L"]
      }
      resources {
        cpu    = 100
        memory = 64
        device "nvidia/gpu" {}
      }
    }
  }
}
