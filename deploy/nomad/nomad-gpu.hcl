# The GPU plugin of this Nomad client. Nomad merges the files of /etc/nomad.d, so this one needs nothing else where plugin_dir is that of
# Nomad's package (<data_dir>/plugins, /opt/nomad/data/plugins). With another plugin_dir: ln -s /usr/bin/nomad-gpu <plugin_dir>/
#
# Nomad reads it when the client starts: nomad-gpu validate --nomad-config /etc/nomad.d/nomad-gpu.hcl && systemctl restart nomad
# An upgrade of the package keeps your changes.

# The label is the name of the file in plugin_dir. Without this block Nomad does not load the plugin.
plugin "nomad-gpu" {
  config {
    # All keys are optional. These are the ones that are set most; docs/configuration.md has all of them.

    # false: offer nothing, and do not open the driver.
    # enabled = true

    # UUIDs of GPUs or MIG instances that are not offered.
    # ignored_gpu_ids = ["GPU-7fd648e1-a695-5024-8c66-5db903cdf8e3"]

    # Which GPUs are offered, under which names, and how they are shared (time-slicing, MPS, MIG). nomad-gpu reload reads the file again.
    # policy_file = "/etc/tandem/policy.yaml"

    # How tasks get their GPUs: "variables" for NVIDIA's container runtime, with device nodes; "devices"; "cdi"; "libraries".
    # injection = ["variables"]

    # Nomad's API, by which top and inspect show the jobs that have the GPUs: this client's, unless its http address is not 127.0.0.1:4646.
    # nomad_address = "http://127.0.0.1:4646"
    # nomad_token_file = "/etc/tandem/nomad.token" # with ACLs: agent:read, node:read, read-job

    # /metrics, /healthz and a status page. Without authentication: keep it local, or behind a firewall.
    # http_address = "127.0.0.1:9411"
  }
}
