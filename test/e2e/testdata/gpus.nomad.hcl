variable "name" {}

variable "driver" {
  default = "raw_exec"
}

variable "device" {
  default = "nvidia/gpu"
}

variable "mig_profile" {
  default = "" # any, and none
}

variable "least_memory" {
  default = "40 GiB"
}

variable "count" {
  default = 2
}

# What the task does after it has printed which GPUs it got.
variable "then" {
  default = "true"
}

job "gpus" {
  name = var.name
  id   = var.name
  type = "batch"

  group "gpus" {
    task "gpus" {
      driver = var.driver
      config {
        command = "/bin/busybox"
        args    = ["sh", "-c", "echo \"my GPUs are $NVIDIA_VISIBLE_DEVICES\"; ${var.then}"]
      }
      resources {
        cpu    = 50
        memory = 32
        dynamic "device" {
          for_each = [var.device]
          iterator = wanted
          labels   = [wanted.value]
          content {
            count = var.count
            constraint {
              attribute = "${device.attr.memory}"
              operator  = ">="
              value     = var.least_memory
            }
            dynamic "constraint" {
              for_each = var.mig_profile == "" ? [] : [var.mig_profile]
              iterator = wanted_profile
              content {
                attribute = "${device.attr.mig_profile}"
                value     = wanted_profile.value
              }
            }
          }
        }
      }
    }
  }
}
