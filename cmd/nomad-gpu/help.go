package main

import (
	"fmt"
	"io"

	"github.com/tandem-gpu/tandem/internal/config"
)

// introduction is for who starts the plugin by hand: %[1]s is the file's name, %[2]s the version.
const introduction = `%[1]s (nomad-gpu %[2]s) is a Nomad device plugin: Nomad starts it, not you.

 1. Put this file into the plugin_dir of the Nomad client (by default <data_dir>/plugins).
 2. Name the file in the client's configuration, and restart the client:

        plugin "%[1]s" {
          config {}
        }

 3. See the GPUs with "nomad node status -self -verbose", ask for one with: device "nvidia/gpu" {}

To see here and now what it offers, or would: %[1]s inspect
`

// usage follows the introduction where help was asked for; the keys of health follow it.
const usage = `
Commands:
  inspect    print what the running plugin offers, what stands against it and why; without one, what it would
               --json          for programs
               --driver-root   without one: where the driver is installed ("/")
               --dev-root      where dev/nvidia0 is (the driver root)
               --sysfs-root    where sysfs is ("/sys")
               --procfs-root   where procfs is ("/proc")
               --policy-file   which GPUs, under which names, for how many (all, each for one)
               --mig-strategy  none, single or mixed (as the file says, else mixed)
  validate   print every problem of a policy file, or what it says: validate /etc/tandem/policy.yaml
  clear      say that what was wrong with a GPU is over
               --gpu           its UUID or the beginning of that, its PCI address or its index
               --cause         as inspect shows it, such as XID_95 (every cause)
               --verified-at   when you looked, such as 2026-11-20T10:31:00Z: what happened later stays (now)
  ignore     disregard for a while what is wrong with a GPU
               --until         a duration such as 4h, or a time
               --gpu, --cause, --verified-at as above
  simulate   rehearse a fault: simulate xid 79, simulate event 0x2000; the config block must allow it
               --gpu           as above
               --gi, --ci      number of a GPU instance, of a compute instance in it (the whole)
  quiesce    leave the driver alone, so that a GPU can be reset or cut up and the driver unloaded; nothing is offered
             meanwhile (also: SIGUSR1)
               --for           a duration such as 2h, or a time (until resumed)
  resume     take the driver back (also: SIGUSR2)
  rebind     have indices, numbers of devices and the common MIG profile of the policy mean the devices of the driver's
             present order; end the work on those first
  debug      print the inside of the running plugin: its parts, calls in the driver, goroutines
               --json          for programs
  version    print the version
  help       print this

  All but validate and the last two take --state-dir, where the plugin's socket is, as in the config block ("/var/lib/tandem").

Keys of the config block, all optional:
  enabled             false: offer nothing and leave the driver alone (true)
  ignored_gpu_ids     UUIDs of GPUs or MIG instances not to offer ([])
  fingerprint_period  between full readings of the machine ("1m")
  driver_root, dev_root, sysfs_root, procfs_root   as above
  policy_file         which GPUs, under which names, for how many: see docs/policy.md; read again at a HUP
  mig_strategy        none, single or mixed (as the policy file says, else mixed)
  group_by            numa or nvlink: a group for each NUMA node or NVLink island, so that a job's GPUs are near (none)
  mps_root            holds nvidia.com/<pool>/pipe of MPS daemons (as the policy file says, else "/run/nvidia/mps")
`

func writeHelp(w io.Writer, name string) {
	fmt.Fprintf(w, introduction+usage, name, version)
	for _, k := range config.HealthSpecs() {
		if k.HCL == config.XIDs {
			fmt.Fprintf(w, "  %-18s  %s\n", k.HCL, `effects of single XIDs: xids = { "63" = "ignore", "94" = "degraded", "999" = "unhealthy" }`)
			continue
		}
		fmt.Fprintf(w, "  %-18s  %s (%s)\n", k.HCL, k.Usage, k.Default)
	}
}
