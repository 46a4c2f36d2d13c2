# A share of a GPU by MPS, in a container. The policy file of the node offers it, and the pool's control daemon must run (mps-daemon.nomad.hcl, docs/sharing.md).
#
# MPS clients need the daemon's pipes and the host's /dev/shm. From 2.0.4 on Nomad refuses ipc_mode (cannot apply "ipc_mode" configuration)
# unless the client's configuration allows it:
#
#   plugin "docker" {
#     config {
#       volumes { enabled = true }
#       allowed_modes { ipc = ["host"] }
#     }
#   }
#
# allow_privileged = true would do, too, and allows much more. A raw_exec task needs none of this.
variable "image" {
  default = "nvidia/cuda:12.8.1-base-ubuntu24.04"
}

job "mps" {
  type = "batch"

  group "gpus" {
    task "gpus" {
      driver = "docker"
      config {
        image    = var.image
        command  = "nvidia-smi"
        args     = ["-L"]
        volumes  = ["/run/nvidia/mps:/run/nvidia/mps"]
        ipc_mode = "host"
      }
      resources {
        cpu    = 100
        memory = 256
        device "nvidia/gpu-mps" {}
      }
    }
  }
}
