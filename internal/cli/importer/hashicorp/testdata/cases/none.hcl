plugin "docker" {
  config {}
}
