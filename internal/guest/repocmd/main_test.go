package repocmd

import (
	"os"
	"testing"

	"github.com/agentlab-vm/agentlab/test/guard"
)

func TestMain(m *testing.M) { os.Exit(guard.Run(m)) }
