# The rights of gpu-fleet in a Nomad region: docs/rescue.md. For the job of gpu-fleet.nomad.hcl, whose tasks then have them by their own identity:
#
#   nomad acl policy apply -namespace default -job gpu-fleet gpu-fleet gpu-fleet-policy.hcl
#
# For a gpu-fleet that runs elsewhere: nomad acl policy apply gpu-fleet gpu-fleet-policy.hcl
#                                      nomad acl token create -name gpu-fleet -policy gpu-fleet

# All namespaces: work that it may not see would look like a GPU that no work holds. In mode report leave alloc-lifecycle out.
namespace "*" {
  capabilities = ["read-job", "alloc-lifecycle"]
}

# The ledger and the leader's lock, where this region has them.
namespace "default" {
  capabilities = ["read-job", "alloc-lifecycle"]
  variables {
    path "nomad/jobs/gpu-fleet" {
      capabilities = ["read", "write"]
    }
    path "nomad/jobs/gpu-fleet/*" {
      capabilities = ["read", "write"]
    }
  }
}

# Nodes with their devices. "write" is for the metadata gpu_repair and for eligibility, of every node; drain is the same right. With "read" these
# marks are missing, and nothing else.
node {
  policy = "write"
}

# Whether the scheduler ends work of lower priority for a replacement.
operator {
  policy = "read"
}
