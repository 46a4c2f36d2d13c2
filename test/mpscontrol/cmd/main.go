// Command cmd is the stand-in of package mpscontrol as a program; its name decides which it is.
package main

import "github.com/tandem-gpu/tandem/test/mpscontrol"

func main() { mpscontrol.Main() }
