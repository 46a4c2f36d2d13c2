# A share of a GPU by time-slicing. The policy file of the node offers it (docs/sharing.md): a rule with "use: time-slicing". Shares have a
# device type of their own, so a job that asks for nvidia/gpu never gets one. They divide time, not memory: one task can use all of it.
job "shared" {
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
        device "nvidia/gpu-shared" {}
      }
    }
  }
}
