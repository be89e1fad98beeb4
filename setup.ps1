# Sets cuadrilla up on native Windows, in .venv of this folder. The counterpart of `make setup`.
# Verified: not run and not parsed on any Windows machine yet; only tools/pick_torch.py, which it calls, is tested.
# Run it with: powershell -ExecutionPolicy Bypass -File setup.ps1   (-Dev adds the tests' libraries)
param([string]$Python = "", [switch]$Dev)

$ErrorActionPreference = "Stop"
Set-Location $PSScriptRoot

function Invoke-Checked([string]$Program, [string[]]$Arguments) {
    & $Program @Arguments
    if ($LASTEXITCODE -ne 0) { throw "$Program failed with exit code $LASTEXITCODE" }
}

$venvPython = Join-Path $PSScriptRoot ".venv\Scripts\python.exe"
if (-not (Test-Path $venvPython)) {
    if ($Python) {
        Invoke-Checked $Python @("-m", "venv", ".venv")
    } else {
        if (-not (Get-Command py -ErrorAction SilentlyContinue)) {
            Write-Host "error: no Python found"
            Write-Host "hint: winget install Python.Python.3.13, then run this again (or: setup.ps1 -Python C:\path\python.exe)"
            exit 3
        }
        $version = @("3.14", "3.13", "3.12", "3.11") | Where-Object { (py --list) -match [regex]::Escape($_) } | Select-Object -First 1
        if (-not $version) {
            Write-Host "error: no Python 3.11 to 3.14 found"
            Write-Host "hint: winget install Python.Python.3.13, then run this again"
            exit 3
        }
        Invoke-Checked "py" @("-$version", "-m", "venv", ".venv")
    }
}

Write-Host "choosing torch"
$choice = & $venvPython tools\pick_torch.py
if ($LASTEXITCODE -ne 0) { exit $LASTEXITCODE }

Write-Host "installing $choice"
Invoke-Checked $venvPython (@("-m", "pip", "install", "--disable-pip-version-check") + $choice.Split(" "))

$extras = if ($Dev) { ".[dev,tensorboard,hf,export]" } else { ".[data,export]" }
Write-Host "installing cuadrilla"
Invoke-Checked $venvPython @("-m", "pip", "install", "--disable-pip-version-check", "-c", "constraints.txt", "-e", $extras)

Write-Host ""
Write-Host "done. Next:"
Write-Host "  .venv\Scripts\Activate.ps1"
Write-Host "  cuadrilla doctor"
Write-Host "  cuadrilla demo"
