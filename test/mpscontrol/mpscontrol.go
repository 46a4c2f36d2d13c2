// Package mpscontrol stands in for nvidia-cuda-mps-control and nvidia-smi, as far as the agents call them: a daemon with the socket, the PID
// file and the log of NVIDIA's, its commands, and compute modes. It runs nothing on a GPU.
//
// A test binary calls Main first and gets the programs by Install; cmd is the same as a program.
package mpscontrol

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Names of the programs.
const (
	Control = "nvidia-cuda-mps-control"
	SMI     = "nvidia-smi"
)

// Files in the folder of the programs.
const (
	FailFile  = "fail"          // while it exists no daemon starts, and its text is why
	EarlyFile = "early"         // while it exists a daemon has a client as soon as it has started
	ModesFile = "compute-modes" // a line "GPU,GPU MODE" for each call of nvidia-smi
)

// PIDFile is the file in a pipe directory with the process of the daemon.
const PIDFile = Control + ".pid"

// server is the PID that the daemon reports for its MPS server.
const server = "4711"

// Main runs the program after which this process is named, and does not return then.
func Main() {
	name := filepath.Base(os.Args[0])
	if name != Control && name != SMI {
		return
	}
	run := control
	if name == SMI {
		run = setMode
	}
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Install puts the programs into a folder, as links to a file that calls Main.
func Install(folder, program string) error {
	return errors.Join(os.MkdirAll(folder, 0o755), os.Symlink(program, filepath.Join(folder, Control)), os.Symlink(program, filepath.Join(folder, SMI)))
}

// folder is where the programs are installed.
func folder() string {
	path, err := exec.LookPath(os.Args[0])
	if err != nil {
		return "."
	}
	return filepath.Dir(path)
}

func setMode(args []string) error {
	if len(args) != 4 || args[0] != "-i" || args[2] != "-c" {
		return fmt.Errorf("unknown arguments %q", args)
	}
	return appendTo(filepath.Join(folder(), ModesFile), args[1]+" "+args[3])
}

func appendTo(path, line string) error {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(f, line)
	return errors.Join(err, f.Close())
}

func control(args []string) error {
	pipe := os.Getenv("CUDA_MPS_PIPE_DIRECTORY")
	switch strings.Join(args, " ") {
	case "-d":
		return start(pipe)
	case "-f":
		return serve(pipe)
	case "":
		return send(pipe)
	}
	return fmt.Errorf("unknown arguments %q", args)
}

// start starts a daemon in a session of its own, and returns when it listens.
func start(pipe string) error {
	if why, err := os.ReadFile(filepath.Join(folder(), FailFile)); err == nil {
		return errors.New(strings.TrimSpace(string(why)))
	}
	if conn, err := dial(pipe); err == nil {
		_ = conn.Close()
		return errors.New("An instance of this daemon is already running") //nolint:staticcheck // NVIDIA's text
	}
	daemon := exec.Command(os.Args[0], "-f") // by its name, which procfs shows
	daemon.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	daemon.Stderr = os.Stderr // as the real one, which keeps it open
	if err := daemon.Start(); err != nil {
		return err
	}
	for range 500 {
		if conn, err := dial(pipe); err == nil {
			return conn.Close()
		}
		time.Sleep(10 * time.Millisecond)
	}
	return errors.New("the daemon does not listen")
}

func dial(pipe string) (*net.UnixConn, error) {
	return net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: filepath.Join(pipe, "control"), Net: "unixpacket"})
}

// send sends each line of stdin as a command and prints the answers.
func send(pipe string) error {
	text, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(text)) {
		conn, err := dial(pipe)
		if err != nil {
			return fmt.Errorf("Cannot find MPS control daemon process: %w", err) //nolint:staticcheck // NVIDIA's text
		}
		answer, err := ask(conn, strings.TrimSpace(line))
		if err := errors.Join(err, conn.Close()); err != nil {
			return err
		}
		fmt.Print(answer)
	}
	return nil
}

func ask(conn net.Conn, command string) (string, error) {
	if _, err := io.WriteString(conn, command); err != nil {
		return "", err
	}
	var answer [4 << 10]byte
	n, err := conn.Read(answer[:])
	return strings.TrimPrefix(string(answer[:n]), "> "), err
}

// Connect connects to the daemon with a pipe directory as a CUDA process does; it is a client until the connection is closed.
func Connect(pipe string) (io.Closer, error) {
	conn, err := dial(pipe)
	if err != nil {
		return nil, err
	}
	_, err = ask(conn, "client")
	return conn, err
}

// Kill kills the daemon with a pipe directory, whose socket stays.
func Kill(pipe string) error {
	text, err := os.ReadFile(filepath.Join(pipe, PIDFile))
	if err != nil {
		return err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return err
	}
	return syscall.Kill(pid, syscall.SIGKILL)
}
