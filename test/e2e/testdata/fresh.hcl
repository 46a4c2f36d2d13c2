# Beside HashiCorp's nomad.hcl in /etc/nomad.d: the sandbox has a loopback interface only, and a small file system for tasks is quicker.
disable_update_check = true

client {
  network_interface = "lo"
  chroot_env = {
    "/bin/busybox" = "/bin/busybox"
    "/bin/sh"      = "/bin/sh"
  }
  gc_disk_usage_threshold  = 99
  gc_inode_usage_threshold = 99
}
