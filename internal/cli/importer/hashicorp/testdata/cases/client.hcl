data_dir   = "/opt/nomad"
plugin_dir = "/opt/nomad/plugins"

client {
  enabled = true
}

plugin "docker" {
  config {
    allow_privileged = true
  }
}

plugin "gpus" {
  args = ["--verbose"]
  config {
    enabled            = "true"
    fingerprint_period = "200ms"
    ignored_gpu_ids    = ["GPU-1", "0", "MIG-2"]
  }
}
