// Package packages checks what is shipped for machines that install the agents from packages: the files in the repository here, and with
// the build tag "packages" the packages themselves.
package packages

import (
	"fmt"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

const repository = "../.."

// defaultHead is what the service has beside the agent's defaults.
const defaultHead = `# Settings of the service k8s-gpu. An upgrade of the package keeps this file. After a change: systemctl restart k8s-gpu
#
# A variable takes precedence over the configuration file (CONFIG_FILE), and a flag over a variable. k8s-gpu validate checks the file,
# k8s-gpu inspect shows what is offered. The service may write in /var/lib/tandem, /run/cdi, the kubelet's device-plugins and
# plugins_registry and Node Feature Discovery's features.d only: for another folder, and for a driver below /home, see man k8s-gpu.

# NVIDIA_VISIBLE_DEVICES for NVIDIA's container runtime, and CDI names beside it while the specification can be used. As in the DaemonSet.
DEVICE_LIST_STRATEGY=auto

# The page and the metrics have no authentication. Prometheus on another node needs an address that it can reach, such as :9410.
HTTP_ADDRESS=127.0.0.1:9410

# All variables, with their defaults.
`

// The environment file of the service has every variable of k8s-gpu. -update writes it.
func TestDefaultFile(t *testing.T) {
	var b strings.Builder
	b.WriteString(defaultHead)
	for _, s := range config.KubernetesSpecs() {
		if s.Hidden || len(s.Env) == 0 {
			continue
		}
		fmt.Fprintf(&b, "\n# %s\n#%s=%s\n", s.Usage, s.Env[0], s.Default)
	}
	goldenfile.Compare(t, repository+"/deploy/systemd/k8s-gpu.default", b.String())
}
