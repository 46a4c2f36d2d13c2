variable "name" {}

variable "driver" {}

variable "count" {
  default = 1
}

# A command of a shell.
variable "then" {}

job "limits" {
  name = var.name
  id   = var.name
  type = "batch"

  group "work" {
    count = var.count
    restart {
      attempts = 0
      mode     = "fail"
    }
    reschedule {
      attempts  = 0
      unlimited = false
    }
    task "work" {
      driver       = var.driver
      kill_timeout = "1s"
      config {
        command = "/bin/busybox"
        args    = ["sh", "-c", var.then]
      }
      resources {
        cpu    = 20
        memory = 16
        device "nvidia/gpu-shared/limited" {}
      }
    }
  }
}
