# Installs or upgrades nomad-gpu on clients, and writes a plugin block if config_file does not exist. README.md has what it cannot do: above
# all, Nomad loads the file when the client is restarted.
#
#   nomad job run -var version=2.0.0 -var 'sha256={"amd64": "...", "arm64": "..."}' install.nomad.hcl
#
# The driver raw_exec must be enabled on the clients. A file with another checksum, a program that does not start on the node, and a
# config_file that the new version refuses leave everything as it is.
variable "version" {
  type        = string
  description = "The version, such as 2.0.0. An earlier one is a rollback."
}

variable "sha256" {
  type        = map(string)
  description = "For each architecture the SHA-256 of its zip, from SHA256SUMS."
}

variable "source" {
  type        = string
  default     = "https://github.com/tandem-gpu/tandem/releases/download"
  description = "Where <version>/nomad-gpu_<version>_linux_<architecture>.zip is, with a v before the first version."
}

variable "plugin_dir" {
  type        = string
  default     = "/opt/nomad/data/plugins"
  description = "The client's plugin_dir: <data_dir>/plugins, unless its configuration has another one."
}

variable "config_file" {
  type        = string
  default     = "/etc/nomad.d/nomad-gpu.hcl"
  description = "The file with the plugin block, in a folder that Nomad reads. It is written only if it does not exist."
}

job "install-nomad-gpu" {
  # Once on each client that is ready when the job is submitted.
  type = "sysbatch"

  constraint {
    attribute = "${attr.kernel.name}"
    value     = "linux"
  }

  dynamic "group" {
    for_each = var.sha256
    labels   = [group.key]
    content {
      constraint {
        attribute = "${attr.cpu.arch}"
        value     = group.key
      }

      restart {
        attempts = 1
        delay    = "5s"
        mode     = "fail"
      }

      task "install" {
        driver = "raw_exec"
        config {
          command = "/bin/sh"
          args    = ["local/install"]
        }
        env {
          WANTED      = var.version
          PLUGIN_DIR  = var.plugin_dir
          CONFIG_FILE = var.config_file
        }
        artifact {
          source      = "${var.source}/v${var.version}/nomad-gpu_${var.version}_linux_${group.key}.zip"
          destination = "local/release"
          options {
            checksum = "sha256:${group.value}"
          }
        }
        template {
          destination = "local/install"
          data        = <<-END
            set -eu
            umask 022
            new=$NOMAD_TASK_DIR/release/nomad-gpu
            fail() { echo "install-nomad-gpu: $*" >&2; exit 1; }
            chmod 0755 "$new"
            has=$("$new" version) || fail "nomad-gpu does not start on this node"
            [ "$has" = "nomad-gpu $WANTED" ] || fail "the release has $has, want $WANTED"
            [ ! -L "$PLUGIN_DIR/nomad-gpu" ] || fail "$PLUGIN_DIR/nomad-gpu is a link, such as that of the package tandem-nomad-gpu: upgrade the package"
            [ ! -e "$CONFIG_FILE" ] || "$new" validate --nomad-config "$CONFIG_FILE" || fail "nomad-gpu $WANTED refuses $CONFIG_FILE"
            mkdir -p "$PLUGIN_DIR" "$(dirname "$CONFIG_FILE")"
            # Both files get their names by a rename, so that half of one is never started, and a plugin that runs keeps its file. Nomad skips other
            # names in plugin_dir. They have the allocation's ID, because the one of a former version of this job may still run.
            plugin=$PLUGIN_DIR/.nomad-gpu.$NOMAD_ALLOC_ID
            config=$CONFIG_FILE.$NOMAD_ALLOC_ID
            trap 'rm -f "$plugin" "$config"' EXIT
            trap 'exit 1' INT TERM
            install -o root -g root -m 0755 "$new" "$plugin"
            printf 'plugin "nomad-gpu" {\n  config {}\n}\n' >"$config"
            sync
            [ -e "$CONFIG_FILE" ] || mv -fT "$config" "$CONFIG_FILE"
            mv -fT "$plugin" "$PLUGIN_DIR/nomad-gpu"
            echo "nomad-gpu $WANTED is in $PLUGIN_DIR. Nomad loads it when the client is restarted: systemctl restart nomad"
          END
        }
        resources {
          cpu    = 100
          memory = 64
        }
      }
    }
  }
}
