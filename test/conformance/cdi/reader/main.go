// Command reader reads CDI specifications as container runtimes do, with the version of the CDI library that it was built with.
package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
)

func main() {
	commands := map[string]func(folder string, args []string) error{"resolve": resolve, "poll": poll, "serve": serve}
	if len(os.Args) < 3 || commands[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: reader resolve|poll|serve FOLDER [NAME...]")
		os.Exit(2)
	}
	if err := commands[os.Args[1]](os.Args[2], os.Args[3:]); err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
}

// open returns a cache of a folder: as podman has it, which reads the folder for each container, or watching, as the others.
func open(folder string, watching bool) (*cdi.Cache, error) {
	return cdi.NewCache(cdi.WithSpecDirs(folder), cdi.WithAutoRefresh(watching))
}

// resolve injects all devices of the names into a container each, and prints what it gets in a line: with and without a watching cache.
func resolve(folder string, names []string) error {
	for _, watching := range []bool{false, true} {
		cache, err := open(folder, watching)
		if err != nil {
			return err
		}
		for path, errs := range cache.GetErrors() {
			return fmt.Errorf("%s: %v", path, errs)
		}
		for _, name := range names {
			if !parser.IsQualifiedName(name) {
				return fmt.Errorf("%s is no qualified name", name)
			}
			text, err := inject(cache, name)
			if err != nil {
				return err
			}
			fmt.Println(text)
		}
	}
	return nil
}

// inject returns what a container gets: "name path:major:minor ... hooks=2 mounts=14 env=A=B,C=D".
func inject(cache *cdi.Cache, name string) (string, error) {
	spec := &oci.Spec{Process: &oci.Process{User: oci.User{UID: 1000}}, Linux: &oci.Linux{}}
	if unresolved, err := cache.InjectDevices(spec, name); err != nil {
		return "", fmt.Errorf("%v: %w", unresolved, err)
	}
	var nodes []string
	for _, d := range spec.Linux.Devices {
		nodes = append(nodes, fmt.Sprintf("%s:%d:%d", d.Path, d.Major, d.Minor))
	}
	for _, rule := range spec.Linux.Resources.Devices {
		if rule.Access != "rw" {
			return "", fmt.Errorf("access %q", rule.Access)
		}
	}
	slices.Sort(nodes)
	hooks := 0
	if spec.Hooks != nil {
		hooks = len(spec.Hooks.CreateContainer)
	}
	return fmt.Sprintf("%s %s hooks=%d mounts=%d env=%s", name, strings.Join(nodes, " "), hooks, len(spec.Mounts), strings.Join(spec.Process.Env, ",")), nil
}

// poll reads the folder anew again and again, until its input ends, and prints how often, and in how many of these reads a file was not
// valid or a name missing.
func poll(folder string, names []string) error {
	end := make(chan struct{})
	go func() { defer close(end); _, _ = io.Copy(io.Discard, os.Stdin) }()
	fmt.Println("ready")
	reads, invalid, missing := 0, 0, 0
	for {
		select {
		case <-end:
			fmt.Println(reads, invalid, missing)
			return nil
		default:
		}
		cache, err := open(folder, false)
		if err != nil {
			return err
		}
		reads++
		if len(cache.GetErrors()) > 0 {
			invalid++
		}
		if slices.ContainsFunc(names, func(name string) bool { return cache.GetDevice(name) == nil }) {
			missing++
		}
	}
}

// serve keeps a watching cache. For each line "inject NAME" it prints what a container gets, and for "await VARIABLE NAME" after how many
// microseconds a container gets that variable.
func serve(folder string, _ []string) error {
	cache, err := open(folder, true)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		words := strings.Fields(in.Text())
		name := words[len(words)-1]
		began := time.Now()
		for {
			text, err := inject(cache, name)
			if err != nil {
				text = "error: " + err.Error()
			}
			if words[0] == "inject" {
				fmt.Println(text)
				break
			}
			if strings.Contains(text+",", words[1]+",") {
				fmt.Println(time.Since(began).Microseconds())
				break
			}
			if time.Since(began) > 10*time.Second {
				fmt.Println("error: not within 10 s")
				break
			}
			time.Sleep(200 * time.Microsecond)
		}
	}
	return nil
}
