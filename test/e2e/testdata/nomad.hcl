bind_addr            = "127.0.0.1"
disable_update_check = true
log_level            = "TRACE"
plugin_dir           = "@PLUGINS@"

client {
  # What a task of the driver "exec" finds in its file system.
  chroot_env = {
    "/bin/busybox" = "/bin/busybox"
    "/etc/passwd"  = "/etc/passwd" # in which Nomad 1.10 looks the user up
  }
  options = {
    "fingerprint.denylist" = "env_aws,env_gce,env_azure,env_digitalocean"
  }
}

plugin "raw_exec" {
  config { enabled = true }
}

# The label is the binary's file name.
plugin "nomad-gpu" {
  config {
    @CONFIG@
  }
}
