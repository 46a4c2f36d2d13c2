package main

// introduction is for who starts the plugin by hand: %[1]s is the file's name, %[2]s the version.
const introduction = `%[1]s (nomad-gpu %[2]s) is a Nomad device plugin: Nomad starts it, not you.

 1. Put this file into the plugin_dir of the Nomad client (by default <data_dir>/plugins).
 2. Name the file in the client's configuration, and restart the client:

        plugin "%[1]s" {
          config {}
        }

 3. See the GPUs with "nomad node status -self -verbose", ask for one with: device "nvidia/gpu" {}

To see here and now what it would offer: %[1]s inspect
`

// usage follows the introduction where help was asked for.
const usage = `
Commands:
  inspect   read this machine's GPUs once
              --json          for programs
              --driver-root   where the driver is installed ("/")
              --dev-root      where dev/nvidia0 is (the driver root)
              --sysfs-root    where sysfs is ("/sys")
              --procfs-root   where procfs is ("/proc")
  version   print the version
  help      print this

Keys of the config block, all optional:
  enabled             false: offer nothing and leave the driver alone (true)
  ignored_gpu_ids     UUIDs of GPUs or MIG instances not to offer ([])
  fingerprint_period  between full readings of the machine ("1m")
  driver_root, dev_root, sysfs_root, procfs_root   as above
`
