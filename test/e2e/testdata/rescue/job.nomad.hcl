# Allocations that each have one GPU. The type decides what Nomad does with one that ends; all but the type is Nomad's default.
job "@NAME@" {
  type = "@TYPE@"

  group "gpus" {
    @GROUP@

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
          @DEVICE@
        }
      }
    }
  }
}
