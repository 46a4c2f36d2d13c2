// Package nomad reads one Nomad region for fleet, and moves allocations in it.
package nomad

import _ "github.com/hashicorp/nomad/api"
