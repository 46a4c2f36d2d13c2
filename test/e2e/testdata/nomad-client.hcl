# Added to nomad.hcl in place of -dev: a client of the server in nomad-server.hcl that keeps its state.
data_dir = "@STATE@/nomad-client"

ports {
  http = 5646
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
}
