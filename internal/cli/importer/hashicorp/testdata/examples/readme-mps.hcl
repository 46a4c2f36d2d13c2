# https://github.com/hashicorp/nomad-device-nvidia/blob/main/README.md#config (development version)
# Licence: MPL-2.0, Copyright HashiCorp, Inc.
plugin "nvidia" {
  config {
    ignored_gpu_ids    = ["uuid1", "uuid2"]
    fingerprint_period = "5s"
    mps {
      mps_pipe_directory = "/tmp/nvidia-mps"
      mps_log_directory = "var/log/nvidia-mps"
    }
  }
}
