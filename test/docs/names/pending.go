package names

// Pending are names of which the document says what the agents will have, by list. Those that are there already must be removed.
var Pending = map[string][]string{
	// MPS control daemons for pools
	"k8s-device-plugin-values": {
		"mps.enableHostPID", "mps.enableHostNetwork",
		// node labels
		"gfd.enabled",
	},
	// configuration by node label
	"config-manager-options": {
		"--node-label", "NODE_LABEL", "--config-file-srcdir", "CONFIG_FILE_SRCDIR", "--default-config", "DEFAULT_CONFIG",
		"--fallback-strategies", "FALLBACK_STRATEGIES",
	},
	// NodeFeature objects, labels written once, labels without a timestamp
	"gpu-feature-discovery-options": {
		"--oneshot", "GFD_ONESHOT", "--no-timestamp", "GFD_NO_TIMESTAMP", "--namespace", "NAMESPACE", "--pod-name", "POD_NAME",
	},
}
