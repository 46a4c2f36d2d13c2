# Only GPUs with enough memory, and no MIG instances. A value with a unit is compared with one with a unit only: 40000 without MiB matches
# nothing. A constraint that no node meets: the job waits ("missing devices").
job "constraint" {
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
            attribute = "${device.attr.memory}"
            operator  = ">="
            value     = "40 GiB"
          }
          constraint {
            attribute = "${device.attr.mig_profile}"
            operator  = "is_not_set"
          }
        }
      }
    }
  }
}
