# In a container of nomad-driver-podman, which takes CDI names from the job only: the pool needs injection: cdi (docs/policy.md), and Podman 4.1
# or newer. The doubled $ keeps Nomad's command line from evaluating the expression before there is a reservation.
variable "image" {
  default = "docker.io/nvidia/cuda:12.8.1-base-ubuntu24.04"
}

job "podman" {
  type = "batch"

  group "gpus" {
    task "gpus" {
      driver = "podman"
      config {
        image   = var.image
        command = "nvidia-smi"
        args    = ["-L"]
        devices = "$${jsondecode(CDI_DEVICES)}"
      }
      resources {
        cpu    = 100
        memory = 256
        device "nvidia/gpu" {}
      }
    }
  }
}
