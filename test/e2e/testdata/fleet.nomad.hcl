# GPUs of one of several clients, until the job is stopped.
job "@NAME@" {
  type = "service"

  group "gpus" {
    count = @COUNT@
    @GROUP@
    migrate {
      min_healthy_time = "1s"
    }
    update {
      max_parallel = 0 # no deployment
    }
    restart {
      attempts = 0
      mode     = "fail"
    }

    task "gpus" {
      driver       = "raw_exec"
      kill_timeout = "1s"
      config {
        command = "/bin/busybox"
        args    = ["sh", "-c", "echo \"my GPUs are $NVIDIA_VISIBLE_DEVICES\"; exec sleep 1000000"]
      }
      resources {
        cpu    = 50
        memory = 32
        device "nvidia/gpu" {
          count = @DEVICES@
          @DEVICE@
        }
      }
    }
  }
}
