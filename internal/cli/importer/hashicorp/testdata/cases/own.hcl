plugin "nomad-gpu" {
  config {
    fingerprint_period = "1m"
    xids { "63" = "ignore" }
    recovery_checks = 4
  }
}
