package control

import (
	"context"
	"log/slog"
	"net"
	"syscall"
)

// peerKey is where the context of a request has who sent it.
type peerKey struct{}

// withPeer notes who is at the other end (unix(7): SO_PEERCRED).
func withPeer(ctx context.Context, c net.Conn) context.Context {
	conn, ok := c.(*net.UnixConn)
	if !ok {
		return ctx
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return ctx
	}
	var who *syscall.Ucred
	if raw.Control(func(fd uintptr) { who, _ = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED) }) != nil || who == nil {
		return ctx
	}
	return context.WithValue(ctx, peerKey{}, *who)
}

// peer is who sent a request, for the log.
func peer(ctx context.Context) slog.Attr {
	who, ok := ctx.Value(peerKey{}).(syscall.Ucred)
	if !ok {
		return slog.String("by", "unknown")
	}
	return slog.Group("by", "uid", who.Uid, "pid", who.Pid)
}
