package dra

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
)

// HasClaims reports whether an adapter has left prepared claims in a state directory, or may have: the kubelet will ask to unprepare them.
func HasClaims(stateDir string) bool {
	entries, err := os.ReadDir(claimsDir(stateDir))
	for _, e := range entries {
		if filepath.Ext(e.Name()) == ".json" {
			return true
		}
	}
	return err != nil && !errors.Is(err, fs.ErrNotExist)
}

// UnreadClaims returns the prepared claims in a state directory that can't be read. It changes nothing.
func UnreadClaims(stateDir, bootID string) []prepared.Unread {
	return prepared.ReadProblems(claimsDir(stateDir), bootID)
}

func claimsDir(stateDir string) string { return filepath.Join(stateDir, "dra", "claims") }
