package command

import "runtime/debug"

// VersionText is the version of this build: what the linker has set; else that of the module, which a build by "go install ...@v2.0.0" has.
func VersionText(linked string) string {
	if linked != "" {
		return linked
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}
