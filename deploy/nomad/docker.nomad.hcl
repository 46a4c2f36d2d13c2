# In a container. With NVIDIA_VISIBLE_DEVICES, the default, Nomad's driver requires Docker's runtime "nvidia", which NVIDIA's container toolkit
# installs (nvidia-ctk runtime configure). Without the toolkit: injection = ["devices", "libraries"] in the plugin block, or in a rule of the
# policy file (docs/policy.md).
variable "image" {
  default = "nvidia/cuda:12.8.1-base-ubuntu24.04"
}

job "docker" {
  type = "batch"

  group "gpus" {
    task "gpus" {
      driver = "docker"
      config {
        image   = var.image
        command = "nvidia-smi"
        args    = ["-L"]
      }
      resources {
        cpu    = 100
        memory = 256
        device "nvidia/gpu" {}
      }
    }
  }
}
