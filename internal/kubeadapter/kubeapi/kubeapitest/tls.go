package kubeapitest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// TLSServer is a Server with HTTPS and a token, as a pod sees the API server.
type TLSServer struct {
	*Server
	TokenFile, CAFile string

	t    testing.TB
	mu   sync.Mutex
	ca   []byte // PEM
	cert tls.Certificate
}

// StartTLS serves HTTPS on a TCP port of localhost until the test ends. The token and the CA certificates are in files.
func StartTLS(t testing.TB) *TLSServer {
	t.Helper()
	folder := t.TempDir()
	s := &TLSServer{t: t, TokenFile: filepath.Join(folder, "token"), CAFile: filepath.Join(folder, "ca.crt")}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}, GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		c := s.cert
		return &c, nil
	}}
	s.Server = serve(&connections{Listener: tls.NewListener(listener, config)})
	s.URL = "https://" + listener.Addr().String()
	t.Cleanup(s.Close)
	s.SetToken("first")
	s.RotateCA(true)
	return s
}

// SetToken writes a token to TokenFile, and accepts only it.
func (s *TLSServer) SetToken(token string) {
	s.AcceptTokens(token)
	s.write(s.TokenFile, []byte(token+"\n"))
}

// RotateCA serves a certificate of a new CA and cuts all connections. With write, CAFile has the new CA.
func (s *TLSServer) RotateCA(write bool) {
	s.mu.Lock()
	s.ca, s.cert = s.certificates()
	s.mu.Unlock()
	if write {
		s.WriteCA()
	}
	s.SetDown(true)
	s.SetDown(false)
}

// WriteCA writes the CA of the served certificate to CAFile.
func (s *TLSServer) WriteCA() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.write(s.CAFile, s.ca)
}

// write replaces a file at once, as the kubelet does.
func (s *TLSServer) write(path string, content []byte) {
	s.t.Helper()
	if err := os.WriteFile(path+".new", content, 0o600); err != nil {
		s.t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		s.t.Fatal(err)
	}
}

// certificates returns a new CA and a certificate that it signed: of 127.0.0.1, and of 192.0.2.1, which a proxy may stand for.
func (s *TLSServer) certificates() ([]byte, tls.Certificate) {
	s.t.Helper()
	caKey, key := s.key(), s.key()
	ca := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), NotBefore: ca.NotBefore, NotAfter: ca.NotAfter, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv4(192, 0, 2, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, KeyUsage: x509.KeyUsageDigitalSignature,
	}
	signed, err := x509.CreateCertificate(rand.Reader, ca, ca, &caKey.PublicKey, caKey)
	if err != nil {
		s.t.Fatal(err)
	}
	own, err := x509.CreateCertificate(rand.Reader, leaf, ca, &key.PublicKey, caKey)
	if err != nil {
		s.t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: signed}), tls.Certificate{Certificate: [][]byte{own}, PrivateKey: key}
}

func (s *TLSServer) key() *ecdsa.PrivateKey {
	s.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		s.t.Fatal(err)
	}
	return key
}
