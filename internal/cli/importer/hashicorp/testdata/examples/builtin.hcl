# https://pkg.go.dev/github.com/hashicorp/nomad@v1.1.13/devices/gpu/nvidia#section-readme
# Licence: MPL-2.0, Copyright HashiCorp, Inc.
config {
  ignored_gpu_ids = ["uuid1", "uuid2"]
  fingerprint_period = "5s"
}
