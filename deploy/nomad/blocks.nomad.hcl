# A whole GPU and a MIG instance for one task. Nomad gives it the device nodes of both blocks, but of each variable the value of the last block
# only: CUDA_VISIBLE_DEVICES, NVIDIA_VISIBLE_DEVICES, CDI_DEVICES. So this works for exec and java; a docker task with NVIDIA's container runtime
# sees the devices of the last block. If the second reservation fails, the task fails, and the first is free again with it.
job "blocks" {
  type = "batch"

  group "gpus" {
    task "gpus" {
      driver = "exec"
      config {
        command = "/bin/sh"
        args    = ["-c", "unset CUDA_VISIBLE_DEVICES; exec nvidia-smi -L"]
      }
      resources {
        cpu    = 100
        memory = 64
        device "nvidia/gpu" {
          constraint {
            attribute = "${device.attr.mig_profile}"
            operator  = "is_not_set"
          }
        }
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
