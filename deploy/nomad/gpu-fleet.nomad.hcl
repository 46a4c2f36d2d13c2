# gpu-fleet as a service job of the region whose work it moves: docs/rescue.md. As shipped it reports what it would do: mode = "act" has it act.
#
#   nomad acl policy apply -namespace default -job gpu-fleet gpu-fleet gpu-fleet-policy.hcl    # where ACLs are on
#   nomad job run -var address=https://nomad.example:4646 gpu-fleet.nomad.hcl
#   nomad alloc exec -task gpu-fleet ALLOCATION gpu-fleet --config-file=/local/gpu-fleet.yaml init    # once for the team
#
# Two allocations run, of which one leads. They need no GPU. The task's own identity is the token, which Nomad renews in a file; no token is in the job.
variable "address" {
  type        = string
  default     = "https://127.0.0.1:4646"
  description = "Nomad's HTTP API, as the tasks reach it."
}

variable "ca_file" {
  type        = string
  default     = "/etc/nomad.d/nomad-agent-ca.pem"
  description = "Certificates of the authority of Nomad's API, on the client."
}

variable "mode" {
  type        = string
  default     = "report"
  description = "off, report or act."
}

variable "image" {
  type        = string
  default     = "ghcr.io/tandem-gpu/gpu-fleet:2.0.0"
  description = "The image."
}

job "gpu-fleet" {
  type = "service"

  constraint {
    attribute = "${attr.kernel.name}"
    value     = "linux"
  }

  group "gpu-fleet" {
    count = 2

    constraint {
      operator = "distinct_hosts"
      value    = "true"
    }

    network {
      port "http" {}
    }

    service {
      name     = "gpu-fleet"
      provider = "nomad"
      port     = "http"
      check {
        type     = "http"
        path     = "/readyz"
        interval = "10s"
        timeout  = "3s"
      }
    }

    task "gpu-fleet" {
      driver       = "docker"
      user         = "65532:65532"
      kill_timeout = "30s" # calls that are under way get their answers, and the lock is released

      identity {
        file = true
      }

      config {
        image           = var.image
        args            = ["--config-file=/local/gpu-fleet.yaml"]
        network_mode    = "host"
        readonly_rootfs = true
        cap_drop        = ["all"]
        security_opt    = ["no-new-privileges"]
        volumes         = ["${var.ca_file}:/etc/gpu-fleet/ca.pem:ro"]
      }

      template {
        destination = "local/gpu-fleet.yaml"
        change_mode = "restart"
        data        = <<-EOT
          clusters:
            - name: nomad
              kind: nomad
              mode: ${var.mode}
              address: ${var.address}
              region: {{ env "NOMAD_REGION" }}
              token_file: /secrets/nomad_token
              ca_file: /etc/gpu-fleet/ca.pem
          ledger:
            cluster: nomad
            namespace: {{ env "NOMAD_NAMESPACE" }}
            name: nomad/jobs/gpu-fleet
          listen: :{{ env "NOMAD_PORT_http" }}
        EOT
      }

      resources {
        cpu    = 100
        memory = 512
      }
    }
  }
}
