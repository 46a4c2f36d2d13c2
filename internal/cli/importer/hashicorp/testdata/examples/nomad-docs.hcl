# https://developer.hashicorp.com/nomad/plugins/devices/nvidia#plugin-configuration
# Licence: MPL-2.0, Copyright HashiCorp, Inc.
plugin "nomad-device-nvidia" {
  config {
    enabled            = true
    ignored_gpu_ids    = ["GPU-fef8089b", "GPU-ac81e44d"]
    fingerprint_period = "1m"
  }
}
