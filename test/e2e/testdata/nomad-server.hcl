bind_addr            = "127.0.0.1"
data_dir             = "@STATE@/nomad-server"
disable_update_check = true

advertise {
  http = "127.0.0.1"
  rpc  = "127.0.0.1"
  serf = "127.0.0.1"
}

server {
  enabled          = true
  bootstrap_expect = 1
}
