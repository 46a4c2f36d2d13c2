# Added to nomad.hcl: the probe in the file system of a task of the driver "exec", a host volume, and where dockerd is.
client {
  chroot_env = {
    @CHROOT@
  }
  host_volume "files" {
    path = "@STATE@/volume"
  }
}

plugin "docker" {
  config {
    endpoint = "unix://@STATE@/docker.sock"
  }
}
