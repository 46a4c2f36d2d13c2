# Added to nomad.hcl in place of -dev: a client of the server in nomad-server.hcl that keeps its state.
name     = "@NODE@"
data_dir = "@STATE@/@NODE@"

ports {
  http = @PORT@
}

advertise {
  http = "127.0.0.1"
  rpc  = "127.0.0.1"
  serf = "127.0.0.1"
}

client {
  enabled           = true
  servers           = ["127.0.0.1:4647"]
  network_interface = "lo"

  # As with -dev: on a disk that is over 80 % full a client removes a job's output as soon as the job has ended.
  gc_disk_usage_threshold  = 99
  gc_inode_usage_threshold = 99
}
