# The MPS control daemons of each client: nomad-gpu mps-daemon runs one for each pool that the plugin of the client shares by MPS (docs/sharing.md).
# Where nomad-gpu is a package, its service nomad-gpu-mps-daemon does the same, and its restart leaves daemons with clients alone.
#
#   nomad job run mps-daemon.nomad.hcl
#
# It reads the pools from the plugin that runs on the client, and starts the programs of the driver, as root: the driver raw_exec must be enabled. A client
# without such a pool has no daemon. Stopping or changing the job ends the daemons, and with them CUDA in the tasks of their GPUs: drain the client before. A restart
# of Nomad's agent or of the plugin does not.
variable "program" {
  type        = string
  default     = "/opt/nomad/data/plugins/nomad-gpu"
  description = "The plugin's file."
}

variable "args" {
  type        = list(string)
  default     = ["--nomad-config=/etc/nomad.d/nomad-gpu.hcl"]
  description = "Where state_dir and mps_root are: the file with the plugin block, or the flags --state-dir and --mps-root."
}

job "mps-daemon" {
  type = "system"

  constraint {
    attribute = "${attr.kernel.name}"
    value     = "linux"
  }

  group "daemons" {
    task "daemons" {
      driver       = "raw_exec"
      kill_signal  = "SIGTERM"
      kill_timeout = "25s" # the daemons without clients are ended, and the compute mode of their GPUs is set back
      config {
        command = var.program
        args    = concat(var.args, ["mps-daemon"])
      }
      resources {
        cpu    = 50
        memory = 128
      }
    }
  }
}
