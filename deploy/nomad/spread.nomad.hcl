# Two tasks with a GPU each, on different nodes if there are free ones. spread is a preference; to demand it:
# constraint { distinct_hosts = true }
job "spread" {
  type = "batch"

  spread {
    attribute = "${node.unique.id}"
  }

  group "gpus" {
    count = 2
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
