# A MIG instance of one profile. Instances are devices of the type nvidia/gpu with the attribute mig_profile, which whole GPUs lack: without the
# constraint a job may get either.
job "mig" {
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
        device "nvidia/gpu" {
          constraint {
            attribute = "${device.attr.mig_profile}"
            value     = "1g.10gb"
          }
        }
      }
    }
  }
}
