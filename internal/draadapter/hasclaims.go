package draadapter

import "path/filepath"

// HasClaims reports whether an adapter has left prepared claims in a state directory: the kubelet will ask to unprepare them.
func HasClaims(stateDir string) bool {
	paths, _ := filepath.Glob(filepath.Join(stateDir, "dra", "claims", "*.json"))
	return len(paths) > 0
}
