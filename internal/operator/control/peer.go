package control

import (
	"context"
	"log/slog"
	"net"
	"syscall"
)

// peerKey is the context key of a client's credentials.
type peerKey struct{}

// withPeer adds the credentials of the client to the context of its connection (unix(7): SO_PEERCRED).
func withPeer(ctx context.Context, c net.Conn) context.Context {
	conn, ok := c.(*net.UnixConn)
	if !ok {
		return ctx
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return ctx
	}
	var creds *syscall.Ucred
	get := func(fd uintptr) { creds, _ = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED) }
	if raw.Control(get) != nil || creds == nil {
		return ctx
	}
	return context.WithValue(ctx, peerKey{}, *creds)
}

// peer is the client of a request, for the log.
func peer(ctx context.Context) slog.Attr {
	creds, ok := ctx.Value(peerKey{}).(syscall.Ucred)
	if !ok {
		return slog.String("peer", "unknown")
	}
	return slog.Group("peer", "uid", creds.Uid, "pid", creds.Pid)
}
