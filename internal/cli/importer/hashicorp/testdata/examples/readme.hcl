# https://github.com/hashicorp/nomad-device-nvidia/blob/v1.1.0/README.md#config
# Licence: MPL-2.0, Copyright HashiCorp, Inc.
plugin "nvidia" {
  config {
    ignored_gpu_ids    = ["uuid1", "uuid2"]
    fingerprint_period = "5s"
  }
}
