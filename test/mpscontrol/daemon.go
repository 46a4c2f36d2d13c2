package mpscontrol

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
)

// daemon has the clients and limits of a daemon that runs.
type daemon struct {
	log string // path

	mu      sync.Mutex
	limits  map[string]string // by the name of the command that sets them, with the device
	clients map[net.Conn]int
	next    int // number of the next client
}

// serve is the daemon, until a command ends it.
func serve(pipe string) error {
	d := &daemon{
		log: filepath.Join(os.Getenv("CUDA_MPS_LOG_DIRECTORY"), "control.log"), limits: map[string]string{}, clients: map[net.Conn]int{}, next: 1,
	}
	if _, err := os.Stat(filepath.Join(folder(), EarlyFile)); err == nil {
		d.next++
	}
	if err := appendTo(d.log, "Starting control daemon for "+os.Getenv("CUDA_VISIBLE_DEVICES")); err != nil {
		return err
	}
	socket := filepath.Join(pipe, "control")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(pipe, PIDFile), fmt.Appendln(nil, os.Getpid()), 0o644); err != nil {
		return err
	}
	for {
		conn, err := l.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err == nil {
			go d.answer(l, conn)
		}
	}
}

// answer answers the commands of a connection.
func (d *daemon) answer(l *net.UnixListener, conn net.Conn) {
	defer func() {
		d.mu.Lock()
		delete(d.clients, conn)
		d.mu.Unlock()
		_ = conn.Close()
	}()
	var command [4 << 10]byte
	for {
		n, err := conn.Read(command[:])
		if err != nil {
			return
		}
		_ = appendTo(d.log, "Cmd:"+string(command[:n]))
		_, _ = io.WriteString(conn, "> "+d.do(conn, strings.Fields(string(command[:n])))) // SOCK_SEQPACKET has no empty message
		if strings.HasPrefix(string(command[:n]), "quit") {
			_ = l.Close() // also with clients; the real one waits for them, unless it is told how long
		}
	}
}

// do does a command and returns its answer.
func (d *daemon) do(conn net.Conn, words []string) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch command := strings.Join(words, " "); {
	case command == "client":
		d.clients[conn] = d.next
		d.next++
	case command == "get_server_list" && d.next > 1: // it stays after its last client
		return server + "\n"
	case command == "get_client_list "+server:
		var list strings.Builder
		for _, n := range d.clients {
			fmt.Fprintln(&list, n)
		}
		return list.String()
	case len(words) > 1 && strings.HasPrefix(command, "set_default_"):
		key := strings.Join(words[:len(words)-1], " ")
		d.limits[strings.Replace(key, "set_", "get_", 1)] = words[len(words)-1]
	default:
		if limit, ok := d.limits[command]; ok {
			return limit + "\n"
		}
	}
	return ""
}
