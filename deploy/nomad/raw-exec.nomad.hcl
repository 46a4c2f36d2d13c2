# Without isolation: the task can open every GPU of the node, and only CUDA_VISIBLE_DEVICES keeps CUDA to its own. The plugin sets that variable
# with injection = ["devices"]; by default the task takes it from NVIDIA_VISIBLE_DEVICES, as here.
job "raw-exec" {
  type = "batch"

  group "gpus" {
    task "gpus" {
      driver = "raw_exec"
      config {
        command = "/bin/sh"
        args    = ["-c", "export CUDA_VISIBLE_DEVICES=\"$NVIDIA_VISIBLE_DEVICES\"; exec nvidia-smi -L"]
      }
      resources {
        cpu    = 100
        memory = 64
        device "nvidia/gpu" {}
      }
    }
  }
}
