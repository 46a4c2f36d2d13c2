package kubeapi

import (
	"fmt"
	"io"
	"os"
	"strings"
)

const (
	maxTokenFile = 64 << 10 // bytes
	maxCAFile    = 4 << 20  // bytes
)

// token reads the token, as for each request: the kubelet replaces it at 80 % of its life.
func (c *Client) token() (string, error) {
	if c.tokenFile == "" {
		return "", nil
	}
	content, err := readFile(c.tokenFile, maxTokenFile)
	if err != nil {
		return "", fmt.Errorf("token: %w (a pod has it with automountServiceAccountToken; elsewhere set its file)", err)
	}
	token := strings.TrimSpace(string(content))
	if token == "" || strings.ContainsAny(token, "\r\n") {
		return "", fmt.Errorf("token: %s: expected one line", c.tokenFile)
	}
	return token, nil
}

func readFile(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // only read
	return io.ReadAll(io.LimitReader(f, limit))
}
