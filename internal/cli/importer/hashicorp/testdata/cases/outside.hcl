plugin "nomad-device-nvidia" {
  fingerprint_period = "5s"
  config {
    ignored_gpu_ids = ["GPU-1"]
    colour          = "blue"
  }
}
