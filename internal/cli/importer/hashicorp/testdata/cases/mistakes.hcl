plugin "nvidia" {
  config {
    enabled            = "perhaps"
    fingerprint_period = "often"
    ignored_gpu_ids    = "GPU-1"
    ignore_gpus        = ["GPU-2"]
  }
}
