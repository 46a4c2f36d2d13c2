# https://github.com/hashicorp/nomad-device-nvidia/blob/main/README.md#config (development version): an equals sign is missing, also there
# Licence: MPL-2.0, Copyright HashiCorp, Inc.
plugin "nvidia" {
  config {
    ignored_gpu_ids    = ["uuid1", "uuid2"]
    fingerprint_period = "5s"
    mps {
      mps_user = "non-root-user-who-owns-mps-server-and-container-tasks"
      device_specific_mps_config [
        {
          uuid = "GPU-1234"
          mps_pipe_directory = "/tmp/nvidia-mps1"
          mps_log_directory = "/var/log/nvidia-mps1"
        },
      ]
    }
  }
}
