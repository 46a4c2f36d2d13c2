variable "name" {}

variable "driver" {
  default = "raw_exec"
}

variable "least_memory" {
  default = "40 GiB"
}

variable "count" {
  default = 2
}

# What the task does after it has said which GPUs it got.
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
        device "nvidia/gpu" {
          count = var.count
          constraint {
            attribute = "${device.attr.memory}"
            operator  = ">="
            value     = var.least_memory
          }
        }
      }
    }
  }
}
