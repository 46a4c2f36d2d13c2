variable "name" {}

variable "driver" {}

variable "seconds" {}

job "owners" {
  name = var.name
  id   = var.name
  type = "batch"

  group "owners" {
    count = 8
    task "sleep" {
      driver       = var.driver
      kill_timeout = "1s"
      config {
        command = "/bin/busybox"
        args    = ["sleep", var.seconds]
      }
      resources {
        cpu    = 20
        memory = 16
        device "nvidia/gpu" {}
      }
    }
  }
}
