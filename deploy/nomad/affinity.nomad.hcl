# Rather a newer architecture, and rather much memory, but anything is better than to wait. Weights of -100 to 100 add up; they order the device
# groups of a node and count for the choice of the node. Affinities have no is_set and is_not_set.
job "affinity" {
  type = "batch"

  group "gpus" {
    task "gpus" {
      driver = "exec"
      config {
        command = "/usr/bin/nvidia-smi"
        args    = ["-L"]
      }
      resources {
        cpu    = 100
        memory = 64
        device "nvidia/gpu" {
          affinity {
            attribute = "${device.attr.compute_capability}"
            operator  = "version"
            value     = ">= 9.0"
            weight    = 50
          }
          affinity {
            attribute = "${device.attr.memory}"
            operator  = ">="
            value     = "40 GiB"
            weight    = 25
          }
        }
      }
    }
  }
}
