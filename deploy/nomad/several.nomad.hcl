# Several GPUs for one task. Nomad takes them from one device group, which is one model by default; with group_by = "nvlink" or "numa" in the
# plugin block it is one NVLink island or NUMA node. More than the largest group has free: the job waits ("devices: no devices match request").
job "several" {
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
          count = 2
        }
      }
    }
  }
}
